"""Examines a trainer before hours are spent: one small rollout, its losses and gradients, and nothing is changed."""

from .examine import DOCTOR_VARIABLE, doctor, doctor_table, run_doctor
from .sample import Check

__all__ = ["DOCTOR_VARIABLE", "Check", "doctor", "doctor_table", "run_doctor"]
