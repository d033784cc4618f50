"""What answers the policy turn by turn: the interface, megarl's two examples, and the processes that run them."""

from megarl.environment.interface import Environment, Messages, Observation, ToolCall, Turn, environment

__all__ = ["Environment", "Messages", "Observation", "ToolCall", "Turn", "environment"]
