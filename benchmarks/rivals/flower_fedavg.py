"""FedAvg by Flower's simulation, for `fedavg_cnn.py`; run by a Python that has flwr[simulation] and torch.

flower_fedavg.py FOLDER PRECISION THREADS OUT PER_CLIENT

Its parts as they come: `FedAvg`, weighted by examples, `run_simulation` on Ray with all clients in every
round. Workers share the THREADS processors; a client gets PER_CLIENT of them, so THREADS / PER_CLIENT train
at a time. Workers keep their images and their network. The clock runs from a turn's start to the server's
call after the round's federated evaluation; starting Ray and the first round do not count.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's workers would stand back behind whatever else runs
}  # fmt: skip

from flower_app import client_app
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from turns import Turns
from work import load, save


class Timed(FedAvg):
    """FedAvg that remembers the accuracy of the round."""

    accuracy: float | None = None

    def aggregate_evaluate(self, *args: object, **kwargs: object) -> MetricRecord | None:
        found = super().aggregate_evaluate(*args, **kwargs)
        self.accuracy = float(found["accuracy"]) if found is not None else None
        return found


def main(folder: str, precision: str, threads: str, out: str, per_client: str) -> None:
    """All rounds, a turn each."""
    turns, work = Turns(), load(folder)
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        m = work.clients
        strategy = Timed(min_train_nodes=m, min_evaluate_nodes=m, min_available_nodes=m)

        def between(round: int, arrays: ArrayRecord) -> None:
            if round == work.settings["save_after"]:
                save(Path(out), dict(arrays.to_torch_state_dict()))
            if round:
                turns.done(accuracy=strategy.accuracy)
            turns.wait()

        told = {"folder": folder, "precision": precision, "threads": int(per_client)}
        strategy.start(
            grid, ArrayRecord(work.start()), num_rounds=work.settings["rounds"],
            train_config=ConfigRecord(told), evaluate_config=ConfigRecord(told), evaluate_fn=between,
        )  # fmt: skip

    init = {"num_cpus": int(threads), "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    resources = {"num_cpus": int(per_client), "num_gpus": 0.0}
    run_simulation(
        app, client_app, work.clients, backend_config={"init_args": init, "client_resources": resources}
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
