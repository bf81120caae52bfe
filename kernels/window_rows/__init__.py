"""The last rows before each row of a step, from the step itself or from a ring kept per sequence."""

from .reference import WindowPlan, WindowRows

__all__ = ["WindowPlan", "WindowRows"]
