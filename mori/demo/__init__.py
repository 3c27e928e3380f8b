"""The complete example of the user guide with 8 ranks on CPUs, checked and timed: `python -m mori.demo`."""
