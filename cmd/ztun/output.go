package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

// An output is the value of -o.
type output string

const (
	outputText output = "text"
	outputJSON output = "json"
)

func (o *output) String() string { return string(*o) }
func (*output) Type() string     { return "text|json" }

func (o *output) Set(s string) error {
	switch v := output(s); v {
	case outputText, outputJSON:
		*o = v
		return nil
	}
	return fmt.Errorf("want %s or %s", outputText, outputJSON)
}

// addOutput adds the flag -o.
func addOutput(cmd *cobra.Command) *output {
	o := outputText
	cmd.Flags().VarP(&o, "output", "o", "form of the output; keys of the JSON object are only ever added")
	return &o
}
