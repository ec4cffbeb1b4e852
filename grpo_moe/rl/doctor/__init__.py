"""Examines a trainer before hours are spent: one small rollout, its losses and gradients, and nothing is changed."""

from grpo_moe.rl.launch import DOCTOR_VARIABLE

from .examine import doctor, doctor_table, run_doctor
from .sample import Check

__all__ = ["DOCTOR_VARIABLE", "Check", "doctor", "doctor_table", "run_doctor"]
