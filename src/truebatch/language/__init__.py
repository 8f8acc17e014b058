"""Messages in the language of the person who reads them."""
