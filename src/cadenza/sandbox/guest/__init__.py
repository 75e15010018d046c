"""Code that runs on the untrusted side: the zygote, the mounts, the agent. Imports the standard library and pytest only.

The zygote loads this package by path under the name ``_cadenza_guest``, so that it needs nothing of the host
process: no environment, no ``sys.path``, no third-party imports beyond pytest.
"""
