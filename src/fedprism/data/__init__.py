"""Data sets, partitions and federations."""

from fedprism.data.arrays import ArrayRows, ImageRows, TableRows
from fedprism.data.catalogue import DATASETS
from fedprism.data.federation import Federation, build_text_federation
from fedprism.data.image_federation import (
    ArrayFederation,
    Preview,
    build_image_federation,
    build_natural_federation,
    preview,
)
from fedprism.data.instruction_federation import InstructionFederation, build_instruction_federation
from fedprism.data.sources import dataset_root, load_text_task
from fedprism.data.text import Rows

__all__ = [
    "DATASETS",
    "ArrayFederation",
    "ArrayRows",
    "Federation",
    "ImageRows",
    "InstructionFederation",
    "Preview",
    "Rows",
    "TableRows",
    "build_image_federation",
    "build_instruction_federation",
    "build_natural_federation",
    "build_text_federation",
    "dataset_root",
    "load_text_task",
    "preview",
]
