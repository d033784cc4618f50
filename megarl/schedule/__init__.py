"""Schedules and plans: which sequence runs in which micro-batch on which data-parallel rank. Pure functions."""

from megarl.schedule.compare import Executed, PhaseStart, PlanMismatch, Summary, compare, refuse_unlike
from megarl.schedule.cost import Cost
from megarl.schedule.phase_plan import MicroBatch, MiniBatch, Plan, Quality, Shape, plan_phase, quality
from megarl.schedule.schedule import Schedule, bubble_share, violations, worst_case_micro_batches

__all__ = [
    "Cost",
    "Executed",
    "MicroBatch",
    "MiniBatch",
    "Plan",
    "PlanMismatch",
    "Quality",
    "Schedule",
    "Shape",
    "Summary",
    "PhaseStart",
    "bubble_share",
    "compare",
    "plan_phase",
    "quality",
    "refuse_unlike",
    "violations",
    "worst_case_micro_batches",
]
