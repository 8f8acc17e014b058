"""Tables as hospitals and registries write them: columns, timestamps, MEDS, OMOP, PhysioNet 2012."""
