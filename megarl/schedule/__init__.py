"""Schedules and plans: which sequence runs in which micro-batch on which data-parallel rank. Pure functions."""

from megarl.schedule.compare import Executed, PlanMismatch, compare
from megarl.schedule.plan import MicroBatch, MiniBatch, Plan, plan_phase
from megarl.schedule.schedule import Schedule, bubble_share, worst_case_micro_batches

__all__ = [
    "Executed",
    "MicroBatch",
    "MiniBatch",
    "Plan",
    "PlanMismatch",
    "Schedule",
    "bubble_share",
    "compare",
    "plan_phase",
    "worst_case_micro_batches",
]
