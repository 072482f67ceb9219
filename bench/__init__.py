"""What Holdfast costs, measured side by side with ipykernel in one run: `make bench`."""
