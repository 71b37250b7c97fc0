"""Fuzzing: everything that reads what comes from outside, fed with changed valid inputs.

`decoders` are functions of bytes; `ports` are sockets of a process that works beside it. Each input may be refused with
one of the errors that are named for it; anything else is a failure, and so is one that takes long, or memory.
"""
