"""Commands that ask something of a run or a service while it lives."""
