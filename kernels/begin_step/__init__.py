"""The beginning of a decode step: table deltas, newest tokens, rows with their padding."""

from .choice import begin_step_on
from .reference import DecodeFields, begin_step
from .words import StepWords

__all__ = ["DecodeFields", "StepWords", "begin_step", "begin_step_on"]
