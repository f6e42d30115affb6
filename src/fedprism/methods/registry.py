"""Name -> method, imported on first use."""

from __future__ import annotations

import difflib
from importlib import import_module

from fedprism.protocol import Method

METHODS: dict[str, str] = {
    "fedsee": "fedprism.methods.fedsee:METHOD",
    "fedsee_geometry": "fedprism.methods.fedsee_geometry:METHOD",
    "fedspm": "fedprism.methods.fedspm:METHOD",
    "feddrm_separate": "fedprism.methods.fedspm:FEDDRM_SEPARATE",
    "fedtar": "fedprism.methods.fedtar:METHOD",
    "fedavg": "fedprism.methods.fedavg:FEDAVG",
    "fedit": "fedprism.methods.fedavg:FEDIT",
    "fedavg_ft": "fedprism.methods.fedavg:FEDAVG_FT",
    "fedprox": "fedprism.methods.fedprox:METHOD",
    "scaffold": "fedprism.methods.scaffold:METHOD",
    "ditto": "fedprism.methods.ditto:METHOD",
    "ifca": "fedprism.methods.ifca:METHOD",
    "fedbabu": "fedprism.methods.fedbabu:METHOD",
    "fedem": "fedprism.methods.fedem:METHOD",
    "fedgmm": "fedprism.methods.fedgmm:METHOD",
    "feddrm": "fedprism.methods.feddrm:METHOD",
    "ffa_lora": "fedprism.methods.lora_averaging:FFA_LORA",
    "fedsa_lora": "fedprism.methods.lora_averaging:FEDSA_LORA",
    "fedex_lora": "fedprism.methods.fedex_lora:METHOD",
    "fedsvd": "fedprism.methods.fedsvd:METHOD",
    "local_only": "fedprism.methods.references:LOCAL_ONLY",
    "centralized": "fedprism.methods.references:CENTRALIZED",
    "public_only": "fedprism.methods.references:PUBLIC_ONLY",
    "untrained": "fedprism.methods.references:UNTRAINED",
}


def get_method(name: str) -> Method:
    """The method of that name. Raises KeyError offering the nearest names."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=3) or sorted(METHODS)
        raise KeyError(f"method '{name}' is not known; did you mean {', '.join(near)}?")
    module, _, attribute = METHODS[name].partition(":")
    method: Method = getattr(import_module(module), attribute)
    return method
