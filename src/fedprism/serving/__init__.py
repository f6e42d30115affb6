"""A finished run in use: rows from outside go to the client they resemble, which answers them."""
