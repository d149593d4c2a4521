from study.records import Patient, admit
from study.splits import train_and_test

__all__ = ["Patient", "admit", "train_and_test"]
