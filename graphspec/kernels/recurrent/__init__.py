"""Convolutions and states of recurrent layers."""

from __future__ import annotations
