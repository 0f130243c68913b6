"""What the output-length predictor would have promised to the requests of a trace."""
