"""Which vision tokens a frozen vision-language model can drop, depending on the question, learned in true batches."""
