"""Requests, pages, scheduler, and the Python API."""
