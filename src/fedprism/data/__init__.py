"""Data sets, partitions and federations."""

from fedprism.data.federation import Federation, build_text_federation
from fedprism.data.sources import DATASETS, dataset_root, load_text_task
from fedprism.data.text import Rows

__all__ = ["DATASETS", "Federation", "Rows", "build_text_federation", "dataset_root", "load_text_task"]
