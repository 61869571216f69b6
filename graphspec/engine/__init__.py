"""Requests of tokens, their pages and rows, the scheduler, and the thread that drives a cycle."""
