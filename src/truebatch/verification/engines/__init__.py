"""Two engines for the same weights: is there anything between them but rounding?"""
