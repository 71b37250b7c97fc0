"""The demo: real models answer through prefill, decode and router processes, compared with a single process."""
