"""Turns of a completion that calls tools: calls within limits, the loop over turns, and the proof of its tokens."""

UNKNOWN = "unknown"
"""Name in the metrics of all names that no tool has, and of a malformed call without a name."""


class ToolError(Exception):
    """Mistake of the policy in a call, which a tool raises with a text that the policy reads.

    It becomes the result of the call, as every exception of a tool does. Unlike every other exception, it is not a
    fault of the tool, and does not stop a run whose policy writes wrong calls.
    """
