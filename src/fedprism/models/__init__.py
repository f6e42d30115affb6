"""Models: named trainable blocks, on frozen backbones or as networks of their own. Import the single models
where they are used: `encoder` and `probe` load transformers, and only when a model is loaded."""

from fedprism.models.interface import Bank, FeatureModel, Model, Outputs

__all__ = ["Bank", "FeatureModel", "Model", "Outputs"]
