"""Files for compose and Kubernetes, written from the description of a container. Text only: nothing is started."""
