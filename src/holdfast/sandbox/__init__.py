"""The walls around a kernel. `confine.py` is the ordered list of what is done to a process.

Runs beside untrusted code: standard library only, no asyncio, nothing of the host.
"""
