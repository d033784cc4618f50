"""Is a node fit to run megarl? Checks that need no torch, so that they say why torch does not import."""

from megarl.doctor.finding import Finding, Verdict

__all__ = ["Finding", "Verdict"]
