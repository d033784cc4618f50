"""How a node says that it cannot go on."""


class NodeError(Exception):
    """The job cannot start on this node, or has lost what it needs; the message says all."""
