"""What came of a run: its summary, its report, and the comparison of several."""
