"""Plans for steps whose microbatches have unlike lengths: an order of the microbatches, and where W go."""
