"""The two processes of each contender: small scripts that `kvbaton.bench.pairs` starts and speaks to.

Each runs in a Python of its own (that of kvbaton, or of an environment that holds a vendor's library), so nothing here may
import more than the standard library, numpy and the contender itself, and modules here import each other relatively.
"""
