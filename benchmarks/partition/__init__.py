"""Why: the claims of `hybridpar.partition`, each with the program that checks it and what it showed."""
