"""Why: what is compiled lies apart from what calls it; these files are read by the process that compiles."""
