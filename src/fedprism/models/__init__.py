"""Models: frozen backbones with named trainable blocks. Import `encoder` and `probe` where they are used:
they load transformers only when a model is loaded."""

from fedprism.models.interface import Bank, Model, Outputs

__all__ = ["Bank", "Model", "Outputs"]
