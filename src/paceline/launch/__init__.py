"""Plans the processes of a run, and starts, watches and ends them on one machine or several."""
