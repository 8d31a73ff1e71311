"""The one error of the command."""

from __future__ import annotations


class IntreeError(Exception):
    """Why nothing was done, in words; one line for each reason."""
