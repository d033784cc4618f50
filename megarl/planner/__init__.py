"""What a recipe will run, cost and waste on a device, forecast before any device is touched."""
