"""What a run is made of and how its processes start, live and end on one machine or several."""
