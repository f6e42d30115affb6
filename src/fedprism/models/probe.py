"""Frozen encoder features with linear heads as experts: the setting of FedSEE's theory (spec 1).

    logits(x) = B phi(x) + sum_m p_m(x) B_m phi(x),   B, B_m: (C, d + 1),   p(x) = softmax(W_r phi(x) + b_r)

phi(x) is the pooled feature of the frozen encoder, standardised per vector without any data (mean 0 and
variance 1 over its d entries, as a layer norm without parameters does), with a constant 1 appended. Random
Fourier features of the standardised vector may take its place (`FourierFeatures`); d is then their number.
There is one projection, "head", no down-projection and no dropout; every example counts as one token.

Pooled features are computed once per text and cached on disk under a hash of backbone, precision, pooling and
tokens; random features are computed from them. The key belongs to the single text, not to a data split: other
partitions, seeds and methods find what one run computed. Every text is encoded in a batch of fixed size,
padded to a length that depends on the text alone, so its feature does not depend on what else was encoded
with it.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprism.models import lora
from fedprism.models.encoder import FrozenEncoder, load_backbone
from fedprism.models.interface import Bank, Batch, Model, Outputs, Tree

PROJECTION = "head"
FEATURES = ("pooled", "rff")
FEATURES_VERSION = 1  # raise it when the standardisation changes: cached features then no longer match
_BATCH = 16  # texts encoded at a time
_LENGTH_STEP = 8  # lengths are padded to multiples of this
_ROWS = 4096  # rows turned into random features at a time


def default_cache_dir() -> Path:
    """Folder of cached features: $FEDPRISM_CACHE, or ~/.cache/fedprism."""
    chosen = os.environ.get("FEDPRISM_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "fedprism"


def standardise(pooled: Tensor) -> Tensor:
    """(b, d) pooled features -> (b, d + 1): each vector to mean 0 and variance 1, then a constant 1."""
    return torch.cat([F.layer_norm(pooled, pooled.shape[-1:]), pooled.new_ones(len(pooled), 1)], 1)


class FourierFeatures:
    """Fixed random Fourier features of standardised vectors (Rahimi and Recht 2007):

        psi(z) = sqrt(2 d / D) cos(W z / (scale sqrt(d)) + b),   W ~ N(0, I) (D, d),   b ~ U[0, 2 pi) (D,)

    so that psi(x).psi(y) / d is close to the Gaussian kernel exp(-|x - y|^2 / (2 s^2)) of width
    s = scale sqrt(d), with an error of order 1 / sqrt(D). A standardised vector has squared length d and two
    unrelated ones lie sqrt(2 d) apart, where scale 1 gives the kernel the value 1/e. The factor gives psi(z)
    the mean squared length d, whatever D is: gradients, and so learning rates, keep their size when these
    features take the place of the vector itself.

    width: d >= 1.   n_features: D >= 1.   scale: > 0, in units of sqrt(d).   seed: of W and b; equal seeds
    give equal numbers in every process.   Raises ValueError for values outside these."""

    def __init__(self, width: int, n_features: int, scale: float, seed: int) -> None:
        if n_features < 1:
            raise ValueError(f"rff_features: got {n_features}, needs at least 1")
        if not (scale > 0 and math.isfinite(scale)):
            raise ValueError(f"rff_scale: got {scale}, needs a finite number above 0")
        self.n_features, self.scale, self.seed = n_features, scale, seed
        # a stream of its own: routers are drawn from the same run seed
        digest = hashlib.sha256(f"random Fourier features {seed}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        directions = torch.randn(n_features, width, dtype=torch.float64, generator=generator)
        self.weight = directions / (scale * math.sqrt(width))  # (D, d)
        self.phase = 2 * math.pi * torch.rand(n_features, dtype=torch.float64, generator=generator)  # (D,)
        self.factor = math.sqrt(2 * width / n_features)

    @property
    def hash(self) -> str:
        """sha256 (hex) of W / s and b."""
        content = self.weight.numpy().tobytes() + self.phase.numpy().tobytes()
        return hashlib.sha256(content).hexdigest()

    def __call__(self, vectors: Tensor) -> Tensor:
        """(n, d) standardised vectors -> (n, D) float32 features."""
        # float64 until the end: how a product rounds depends on the number of rows, and float32 hides it
        parts = [
            (self.factor * torch.cos(F.linear(part.double(), self.weight, self.phase))).float()
            for part in vectors.split(_ROWS)
        ]
        return torch.cat(parts) if parts else vectors.new_zeros(0, self.n_features)


class ProbeModel(Model):
    """Linear heads on cached features of a frozen encoder.

    backbone: a transformers encoder, frozen here.   tokenizer, name: as in `EncoderModel`.
    n_classes: C >= 2.   pool: "mean" or "first".   max_length: longest batch the caller will send.
    cache_dir: folder of cached features, None for `default_cache_dir()`.
    precision: "fp32", "bf16" or "auto".   features: "pooled", or "rff" for random Fourier features of it.
    rff_features, rff_scale, seed: number, width and seed of these (`FourierFeatures`); else unused.
    Raises ValueError for values outside these."""

    def __init__(
        self,
        backbone: nn.Module,
        *,
        tokenizer: Any = None,
        name: str = "custom",
        n_classes: int = 2,
        pool: str = "mean",
        max_length: int | None = None,
        cache_dir: Path | str | None = None,
        precision: str = "fp32",
        features: str = "pooled",
        rff_features: int = 512,
        rff_scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        if n_classes < 2:
            raise ValueError(f"n_classes: got {n_classes}, needs at least 2")
        if features not in FEATURES:
            raise ValueError(f"features: got '{features}', needs one of {', '.join(FEATURES)}")
        self.encoder = FrozenEncoder(backbone, pool=pool, precision=precision, max_length=max_length)
        self.tokenizer, self.name, self.n_classes, self.max_length = tokenizer, name, n_classes, max_length
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
        self.projections = (PROJECTION,)
        self.blocks = {
            "lora_A": (),
            "lora_B": ("lora_B.head",),
            "router": ("router.head.weight", "router.head.bias"),
            "head": (),
        }
        self.fourier: FourierFeatures | None = None
        if features == "rff":
            self.fourier = FourierFeatures(self.encoder.width, rff_features, rff_scale, seed)
        self.width = (self.encoder.width if self.fourier is None else rff_features) + 1  # of phi
        self._spread: float | None = None
        self._store: FeatureStore | None = None  # opened when first needed

    @property
    def precision(self) -> str:
        """Resolved precision, "fp32" or "bf16"."""
        return self.encoder.precision

    def init(self, block: str, seed: int, n_experts: int = 0) -> Tree:
        """See `Model.init`; lora_A and head are empty."""
        if block in ("lora_A", "head"):
            return {}
        if block == "lora_B":
            return {"lora_B.head": torch.zeros(self.n_classes, self.width)}
        if block == "router":
            names = self.blocks["router"]
            return lora.init_router(names, dict.fromkeys(names, self.width), n_experts, seed)
        raise KeyError(f"init: no block '{block}' among {sorted(self.blocks)}")

    def apply(
        self,
        tree: Tree,
        batch: Batch,
        *,
        bank: Bank | None = None,
        generator: torch.Generator | None = None,
    ) -> Outputs:
        """See `Model.apply`. batch: features (b, d + 1) as from `prepare`. Nothing here is random."""
        if "features" not in batch:
            raise ValueError(f"probe: got {sorted(batch)}, needs 'features'; call prepare(rows) first")
        pair, _ = lora.check_tree(tree, self.blocks)
        phi = batch["features"]
        logits = F.linear(phi, pair["lora_B.head"]) if pair else phi.new_zeros(len(phi), self.n_classes)
        if bank is None:
            return Outputs(logits)
        lora.check_bank(bank, self.blocks)
        ones = torch.ones(len(phi), 1, dtype=torch.long)
        now = lora.ForwardPass(pair, bank, ones, 1.0, 0, None)
        heads = torch.stack([bank.experts[m]["lora_B.head"] for m in now.experts])  # (U, C, d + 1)
        if bank.weights is not None:
            mixed = torch.einsum("m,mcd->cd", bank.weights[now.experts], heads)
            return Outputs(logits + F.linear(phi, mixed))
        p = now.route(PROJECTION, "router.head", phi.unsqueeze(1), phi)  # (b, U)
        each = F.linear(phi, heads.flatten(0, 1)).view(len(phi), *heads.shape[:2])  # (b, U, C)
        logits = logits + (p.unsqueeze(1) @ each).squeeze(1)
        return Outputs(logits, now.usage_sum(self.projections), torch.ones(len(phi)))

    def features(self, rows: Any) -> Tensor:
        """(n, d + 1) float32 pooled features of a data split in the order of its rows, cached where possible.

        rows: a data split with `batches(size)` and `columns["row"]` (rows with one number have one text).
        Raises ValueError if a cached file is damaged, OSError if the cache cannot be written."""
        if self._store is None:
            parts = (FEATURES_VERSION, self.encoder.hash, self.precision, self.encoder.pool)
            name = hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()
            self._store = FeatureStore(self.cache_dir / name, self.encoder.width + 1)
        texts: dict[int, tuple[Tensor, Tensor | None]] = {}  # row number -> its tokens and token types
        for batch in rows.batches(256):
            types = batch.get("token_type_ids")
            for k, (row, length) in enumerate(
                zip(batch["row"].tolist(), batch["attention_mask"].sum(1).tolist(), strict=True)
            ):
                texts[row] = (batch["input_ids"][k, :length], None if types is None else types[k, :length])
        keys = {row: _text_key(*text) for row, text in texts.items()}
        missing = {keys[row]: text for row, text in texts.items() if keys[row] not in self._store}
        if missing:
            self._store.add(self._encode(missing))
        return self._store.take([keys[row] for row in rows.columns["row"].tolist()])

    def prepare(self, rows: Any) -> Any:
        """The data split with phi of its rows: `features`, computed once with the frozen encoder, or random
        features of these, with a constant 1 appended."""
        phi = self.features(rows)
        if self.fourier is not None:
            phi = torch.cat([self.fourier(phi[:, :-1]), phi[:, -1:]], 1)
        return rows.with_features(phi)

    def _encode(self, texts: dict[bytes, tuple[Tensor, Tensor | None]]) -> dict[bytes, Tensor]:
        """Feature of each text, from batches of `_BATCH` texts whose lengths round up to one multiple."""
        by_length: dict[int, list[bytes]] = {}
        for key, (ids, _) in texts.items():
            padded = -(-len(ids) // _LENGTH_STEP) * _LENGTH_STEP
            limit = padded if self.encoder.positions is None else self.encoder.positions
            by_length.setdefault(max(min(padded, limit), len(ids)), []).append(key)
        found: dict[bytes, Tensor] = {}
        with torch.no_grad():
            for length, keys in sorted(by_length.items()):
                for start in range(0, len(keys), _BATCH):
                    group = keys[start : start + _BATCH]
                    filled = group + group[:1] * (_BATCH - len(group))  # always the same shape
                    batch = self._batch([texts[key] for key in filled], length)
                    states = self.encoder.hidden(batch)
                    features = standardise(self.encoder.pooled(states, batch["attention_mask"]))
                    found.update(zip(group, features, strict=False))
        return found

    def _batch(self, texts: list[tuple[Tensor, Tensor | None]], length: int) -> dict[str, Tensor]:
        """Texts as a batch padded to `length`."""
        ids = torch.full((len(texts), length), self.encoder.pad, dtype=torch.long)
        mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
        typed = all(text[1] is not None for text in texts)
        for k, (tokens, kinds) in enumerate(texts):
            ids[k, : len(tokens)] = tokens
            mask[k, : len(tokens)] = 1
            if kinds is not None:
                types[k, : len(tokens)] = kinds
        batch = {"input_ids": ids, "attention_mask": mask}
        return {**batch, "token_type_ids": types} if typed else batch

    def logit_spread(self, batch: Batch) -> float:
        """Mean over examples of the largest minus the smallest logit at the start: 0, as heads start at 0."""
        with torch.no_grad():
            logits = self.apply(self.init("lora_B", 0), batch).logits
        self._spread = float((logits.amax(1) - logits.amin(1)).mean())
        return self._spread

    def describe(self) -> dict[str, Any]:
        """See `Model.describe`. Sizes are numbers of entries; the router's is per expert. "rff" holds number,
        scale, seed and sha256 of random features."""
        found: dict[str, Any] = {
            "kind": "probe",
            "backbone": self.name,
            "weights_sha256": self.encoder.hash,
            "precision": self.precision,
            "blocks": {
                "lora_A": 0,
                "lora_B": self.n_classes * self.width,
                "router_per_expert": self.width + 1,
                "head": 0,
            },
            "projections": list(self.projections),
            "n_classes": self.n_classes,
            "pool": self.encoder.pool,
            "features": "pooled" if self.fourier is None else "rff",
            "max_length": self.max_length,
            "logit_spread": self._spread,
        }
        if self.fourier is not None:
            drawn = self.fourier
            found["rff"] = {
                "n_features": drawn.n_features,
                "scale": drawn.scale,
                "seed": drawn.seed,
                "sha256": drawn.hash,
            }
        return found


class FeatureStore:
    """Features by key of their text, in memory and as safetensors files of one folder.

    folder: holds files with `keys` (n, 32) bytes and `features` (n, width); made when first written. Each
    call of `add` writes one file, under a temporary name first, so several processes may share the folder.
    Raises ValueError naming the file if one cannot be read."""

    def __init__(self, folder: Path, width: int) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        self.folder, self.width = folder, width
        self._at: dict[bytes, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                held = load_file(path)
                keys, features = held["keys"], held["features"]
            except (SafetensorError, KeyError) as error:
                raise ValueError(
                    f"probe: cached features {path} are damaged ({error}); delete the file"
                ) from None
            if features.shape != (len(keys), width):
                shape = tuple(features.shape)
                raise ValueError(
                    f"probe: {path} holds {shape}, needs ({len(keys)}, {width}); delete the file"
                )
            self._keep(keys, features)

    def __contains__(self, key: bytes) -> bool:
        return key in self._at

    def _keep(self, keys: Tensor, features: Tensor) -> None:
        self._at.update(zip((row.numpy().tobytes() for row in keys), features, strict=True))

    def add(self, features: dict[bytes, Tensor]) -> None:
        """Keep the features, and write them to a new file of the folder (temporary name, flush, rename)."""
        from safetensors.torch import save

        keys = torch.frombuffer(bytearray(b"".join(features)), dtype=torch.uint8).view(-1, 32)
        values = torch.stack(list(features.values()))
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".features-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(save({"keys": keys, "features": values}))
                file.flush()
                os.fsync(file.fileno())
            content = hashlib.sha256(keys.numpy().tobytes()).hexdigest()
            Path(name).replace(self.folder / f"{content[:32]}.safetensors")
        except BaseException:
            Path(name).unlink()
            raise
        self._keep(keys, values)

    def take(self, keys: list[bytes]) -> Tensor:
        """(len(keys), width) features in the order of the keys, all of which must be held."""
        return torch.stack([self._at[key] for key in keys]) if keys else torch.zeros(0, self.width)


def _text_key(tokens: Tensor, types: Tensor | None) -> bytes:
    """sha256 of a text's token ids and token types (no types equals all zero)."""
    digest = hashlib.sha256(tokens.to(torch.int32).numpy().tobytes())
    if types is not None and bool(types.any()):
        digest.update(types.to(torch.int32).numpy().tobytes())
    return digest.digest()


def load_probe(
    backbone: str,
    *,
    n_classes: int = 2,
    features: str = "pooled",
    pool: str = "mean",
    max_length: int | None = None,
    cache_dir: Path | str | None = None,
    precision: str = "fp32",
    rff_features: int = 512,
    rff_scale: float = 1.0,
    seed: int = 0,
) -> ProbeModel:
    """Load a backbone by name or path and build a `ProbeModel` on it.

    backbone: "minilm", a hub name or a local folder.   seed: of the random features; nothing else is drawn.
    The rest as in `ProbeModel`. Raises ValueError or FileNotFoundError, one line, if it cannot be used."""
    model, tokenizer = load_backbone(backbone)
    return ProbeModel(
        model,
        tokenizer=tokenizer,
        name=backbone,
        n_classes=n_classes,
        pool=pool,
        max_length=max_length,
        cache_dir=cache_dir,
        precision=precision,
        features=features,
        rff_features=rff_features,
        rff_scale=rff_scale,
        seed=seed,
    )
