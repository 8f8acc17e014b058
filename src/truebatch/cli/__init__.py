"""The command line. Importing one command of it does not import the others."""
