from attoscope.cli import main

main()
