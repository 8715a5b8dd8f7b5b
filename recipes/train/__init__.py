"""Training: assemble a run (`job`), loop over its steps (`loop`), judge each step (`guard`), evaluate (`evaluate`)."""
