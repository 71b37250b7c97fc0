"""Prefill and decode servers that speak SGLang's PD HTTP API, and the processes of a whole deployment."""
