"""Whether recipes give what the libraries that they come from give."""
