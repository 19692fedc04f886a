"""`python -m decode_node MODEL`: one node process that begins as a decode node."""

from serving_node.process import node_command

main = node_command("decode")

if __name__ == "__main__":
    main()
