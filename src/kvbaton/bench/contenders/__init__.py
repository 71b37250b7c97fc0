"""The two processes of each contender: small scripts that `kvbaton.bench.pairs` starts and speaks to.

Each runs in a Python of its own: that of kvbaton, or of an environment that holds a vendor's library. So a module here
imports the standard library, numpy and its contender, nothing else, and its neighbours relatively.
"""
