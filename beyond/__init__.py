"""What is ours, not the paper's: faster fields, training by matching, a transformer, Muon."""
