"""Text and tokens: tokenizers and chat templates, the ends of an output, and grammars written as schemas or patterns."""

from __future__ import annotations
