"""The clients of FedAvg by Flower, for `flower_fedavg.py`. A module of its own: Flower's workers import it,
so that what they read stays with them from message to message."""

from __future__ import annotations

import functools

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.nn import functional as F
from work import LeNet, Work, autocast, load

client_app = ClientApp()


@functools.cache
def network(folder: str) -> LeNet:
    """One network per worker; every message brings its tensors."""
    return load(folder).network()


@functools.cache
def images(folder: str, client: int, split: str) -> tuple[Tensor, Tensor]:
    """A client's rows, finished once per worker."""
    return load(folder).images(client, split)


def opened(message: Message, context: Context) -> tuple[Work, str, int, ConfigRecord, LeNet]:
    """Work, its folder, the client's number, the server's settings, and the network with the sent tensors."""
    sent = message.content["config"]
    torch.set_num_threads(int(sent["threads"]))
    folder = str(sent["folder"])
    module = network(folder)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return load(folder), folder, int(context.node_config["partition-id"]), sent, module


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Local steps over the rows of the plan."""
    work, folder, client, sent, module = opened(message, context)
    x, y = images(folder, client, "train")
    sgd = work.optimizer(module.parameters(), work.settings["lr"])
    losses = []
    for rows in work.plan(int(sent["server-round"]) - 1, client):
        with autocast(str(sent["precision"])):
            loss = F.cross_entropy(module(x[rows]), y[rows])
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(float(loss.detach()))
    metrics = MetricRecord({"loss": sum(losses) / len(losses), "num-examples": len(x)})
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """The global model on the client's validation rows."""
    work, folder, client, sent, module = opened(message, context)
    x, y = images(folder, client, "validation")
    right = 0
    with torch.no_grad(), autocast(str(sent["precision"])):
        for at in range(0, len(x), work.settings["evaluated"]):
            part = slice(at, at + work.settings["evaluated"])
            right += int((module(x[part]).argmax(1) == y[part]).sum())
    metrics = MetricRecord({"accuracy": right / len(x), "num-examples": len(x)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
