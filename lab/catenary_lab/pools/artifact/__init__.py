"""Plans under the rules of PPipe's artifact, which counts in slots of a GPU."""
