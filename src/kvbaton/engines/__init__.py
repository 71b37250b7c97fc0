"""Engines that kvbaton serves: each describes its memory as a layout and drives senders and receivers."""
